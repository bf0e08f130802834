"""The losses of trl's SFTTrainer on given conversations, in their order: run as a program, with trl on its path.

    python trl_losses.py SPEC.json OUT.json

The specification has `base` (a Hugging Face folder), `messages` (a list of conversations), `template` (with generation marks),
`trainings` (our settings, by kind) and `threads`.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from tasks.config.training import TrainingConfig
from tasks.jobs.training.schedule import learning_rate


class Trainer(SFTTrainer):
    """With our schedule, and every micro batch's part of the loss kept."""

    def __init__(self, *args, ours, **more):
        self.ours, self.parts = ours, []
        super().__init__(*args, **more)

    def create_scheduler(self, num_training_steps, optimizer=None):
        ours = self.ours
        self.lr_scheduler = LambdaLR(
            optimizer or self.optimizer, lambda step: learning_rate(ours, step + 1) / ours.learning_rate
        )
        return self.lr_scheduler

    def training_step(self, *args, **more):
        loss = super().training_step(*args, **more)
        self.parts.append(float(loss))
        return loss


def losses_of(spec, ours, out):
    """The losses of each step, as computed and as logged, and norms of gradients."""
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(ours.seed)
    shape = AutoConfig.from_pretrained(spec["base"])
    shape.pad_token_id = (
        None  # as ours: torch.nn.Embedding never trains the row of its padding token, which may end turns
    )
    options = {"config": shape, "dtype": torch.float32, "attn_implementation": "sdpa"}
    network = AutoModelForCausalLM.from_pretrained(spec["base"], **options)
    if ours.lora.rank:
        torch.manual_seed(ours.seed)
        settings = {"r": ours.lora.rank, "lora_alpha": ours.lora.alpha, "target_modules": "all-linear"}
        network = get_peft_model(network, LoraConfig(task_type="CAUSAL_LM", **settings))
    tokenizer = AutoTokenizer.from_pretrained(spec["base"])
    tokenizer.chat_template = spec["template"]
    tokenizer.pad_token = tokenizer.eos_token
    config = SFTConfig(
        output_dir=str(out.parent / "trl"),
        max_steps=ours.steps,
        per_device_train_batch_size=ours.micro_batch_size,
        gradient_accumulation_steps=ours.global_batch_size // ours.micro_batch_size,
        learning_rate=ours.learning_rate,
        weight_decay=ours.weight_decay,
        adam_beta1=ours.beta1,
        adam_beta2=ours.beta2,
        max_grad_norm=ours.gradient_clip,
        seed=ours.seed,
        train_sampling_strategy="sequential",
        assistant_only_loss=True,
        max_length=None,
        packing=False,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
    )
    data = Dataset.from_list([{"messages": messages} for messages in spec["messages"]])
    trainer = Trainer(model=network, args=config, train_dataset=data, processing_class=tokenizer, ours=ours)
    trainer.train()
    each = ours.global_batch_size // ours.micro_batch_size
    losses = [sum(trainer.parts[at : at + each]) for at in range(0, len(trainer.parts), each)]
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"losses": losses, "logged": logged, "norms": norms}


def main(spec, out):
    trainings = {kind: TrainingConfig.model_validate(each) for kind, each in spec["trainings"].items()}
    out.write_text(json.dumps({kind: losses_of(spec, ours, out) for kind, ours in trainings.items()}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
