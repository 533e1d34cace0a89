"""train.steps may change at a resume. With a decay the learning rate would jump, which must not happen silently.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/longer_decay.py
"""

import sys
import tempfile
from pathlib import Path

from dppo_megatron.config import ConfigError, save_resolved
from dppo_megatron.run.checks import check_run_dir
from dppo_megatron.run_dir import RunDir
from tests.support.configs import make_config

wrong = False
for decay in ("constant", "linear", "cosine"):
    for steps in (4, 8, 16):
        with tempfile.TemporaryDirectory() as directory:

            def config(number, directory=directory, decay=decay):
                return make_config(run={"dir": directory}, train={"steps": number}, optimizer={"decay": decay})

            save_resolved(config(8), RunDir(Path(directory)).config)
            try:
                check_run_dir(config(steps), "config.yaml", resume=True)
                said = "accepted"
            except ConfigError as error:
                said = str(error).splitlines()[-1].strip()
        moved = decay != "constant" and steps != 8
        wrong |= moved == (said == "accepted")
        print(f"{decay}, started with 8 steps, resumed with {steps}: {said}")
sys.exit(wrong)
