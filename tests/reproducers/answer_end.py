"""nll with a tokenizer that has no end token, while generation_config.json has one, must train the template's end.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/answer_end.py
"""

import json
import sys
import tempfile
from pathlib import Path

from dppo_megatron.data.prompts import training_prompts
from dppo_megatron.data.tokenizer import end_token_ids, load_tokenizer
from dppo_megatron.hf.small_model import chat_tokenizer, write_small_model
from dppo_megatron.train.trainer.batches import SupervisedBatches
from tests.support.configs import make_config

work = Path(tempfile.mkdtemp())
model = work / "model"
write_small_model(model, 0, chat_tokenizer(positions=64))
settings = json.loads((model / "tokenizer_config.json").read_text())
settings.pop("eos_token")
(model / "tokenizer_config.json").write_text(json.dumps(settings))
(work / "train.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
config = make_config(
    run={"dir": str(work / "run")}, model={"path": str(model)}, objective={"name": "nll"},
    data={"train": str(work / "train.jsonl"), "chat_template": True}, rollout={"prompts_per_step": 1, "group_size": 1},
)  # fmt: skip
tokenizer = load_tokenizer(model)
print("tokens that end a response:", tokenizer.convert_ids_to_tokens(end_token_ids(model, tokenizer)))
(update,) = SupervisedBatches(config, training_prompts(config, tokenizer), tokenizer, 0, 1).read(0).updates
batch = update.micro_batches[0]
turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
trained, written = tokenizer.decode(batch.target_ids[batch.mask]), tokenizer.apply_chat_template(turns, tokenize=False)
print("trained:", repr(trained))
print("the chat template has:", repr(written))
sys.exit(trained not in written or trained == "2")
