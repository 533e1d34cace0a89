"""Verifies pairs of an HF directory and a Megatron checkpoint, one JSON line each. Run by `test_verify`."""

import dataclasses
import json
import sys
from pathlib import Path

from dppo_megatron.convert.verify import verify

if __name__ == "__main__":
    for pair in json.loads(sys.argv[1]):
        result = verify(*map(Path, pair))
        print(json.dumps({**dataclasses.asdict(result), "text": str(result)}))
