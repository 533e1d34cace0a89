"""Exit with 1 if an adapter of PEFT with an init method that changed the base weights (PiSSA, OLoRA) is accepted.

PEFT repeats the init when it loads such an adapter, so base + adapter is right there. Run from a clone's root:
PYTHONPATH=. OMP_NUM_THREADS=1 python tests/reproducers/adapter_init.py [init_lora_weights ...]
"""

import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from dppo_megatron.hf import ModelError, make_random_hf_model, read_hf_config
from dppo_megatron.hf.peft import adapter_problems
from dppo_megatron.train.actor import Actor, init_layout
from tests.support.actor_cases import QWEN3, actor_config

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
work = Path(tempfile.mkdtemp())
make_random_hf_model(work / "base", {**QWEN3, "vocab_size": 64}, seed=0)
tokens = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(1))


def base():
    return AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.float32)


wrong = False
for init in (True, "gaussian", *(sys.argv[1:] or ["pissa", "olora"])):
    torch.manual_seed(0)
    trained = get_peft_model(base(), LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=init))
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(5):
        trained(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = work / f"adapter-{init}"
    trained.save_pretrained(saved)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base(), saved)(input_ids=tokens).logits
    want = logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    config = actor_config(work / "base", lora={"r": 4, "alpha": 8, "targets": TARGETS, "adapter": str(saved)})
    said = adapter_problems(saved, read_hf_config(work / "base"), config.model.lora)
    layout = init_layout(config)
    actor = Actor(config, layout)
    try:
        actor.load_start()
        got = torch.from_numpy(actor.score(tokens[0].numpy().astype("int32")))
        gap = float((got - want).abs().max())
        bad = gap > 1e-4
        print(f"init_lora_weights={init}: log-probs differ from PEFT's by {gap:.1e} nats; problems: {said}")
    except ModelError as error:
        bad = init in (True, "gaussian") or not said
        print(f"init_lora_weights={init}: rejected: {error}")
    finally:
        layout.close()
    wrong |= bad
sys.exit(wrong)
