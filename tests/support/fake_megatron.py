"""A checkout of Megatron-LM whose `pretrain_gpt.py` trains nothing: it takes the real one's arguments and no others, prints its
lines, writes files of its names in its order, resumes from them, and saves when it is asked to stop.

The names, and how many values each has, are those of NVIDIA/Megatron-LM @d98e8a64 and microsoft/Megatron-DeepSpeed @f4157bea, as
their own parsers took them.
"""

import textwrap

import numpy as np
from safetensors.numpy import save_file

FLAGS = """
swiglu disable-bias-linear untie-embeddings-and-output-weights sequence-parallel bf16 group-query-attention
use-distributed-optimizer exit-on-missing-checkpoint log-throughput reset-position-ids reset-attention-mask exit-signal-handler
use-rotary-position-embeddings no-query-key-layer-scaling deepspeed-activation-checkpointing deepspeed no-pipeline-parallel
overlap-grad-reduce override-opt_param-scheduler no-rope-fusion no-persist-layer-norm no-masked-softmax-fusion
no-gradient-accumulation-fusion
"""
VALUES = """
num-layers hidden-size ffn-hidden-size num-attention-heads seq-length max-position-embeddings attention-dropout hidden-dropout
init-method-std make-vocab-size-divisible-by lr min-lr lr-warmup-init lr-warmup-iters lr-decay-iters weight-decay
adam-beta1 adam-beta2 clip-grad seed micro-batch-size global-batch-size train-iters eval-iters
tensor-model-parallel-size pipeline-model-parallel-size
num-query-groups position-embedding-type normalization norm-epsilon lr-decay-style lr-wsd-decay-style lr-wsd-decay-iters
context-parallel-size recompute-granularity recompute-method recompute-num-layers tokenizer-type dataloader-type ckpt-format
data-path split data-cache-path tokenizer-model save save-interval load log-interval num-key-value-heads layernorm-epsilon
ds-sequence-parallel-size deepspeed_config zero-stage transformer-impl
"""
PROGRAM = """
import argparse, json, os, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser(allow_abbrev=False)
for name in FLAGS.split():
    parser.add_argument(f"--{name}", action="store_true")
for name in VALUES.split():
    parser.add_argument(f"--{name}")
args = parser.parse_args()
if not args.deepspeed and args.transformer_impl != "local":
    import transformer_engine  # what the real one builds its layers from by default
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
pace, die_at = float(os.environ.get("FAKE_PACE", 0)), int(os.environ.get("FAKE_DIE_AT", 0))
assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and Path(args.data_path + ".bin").exists()
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
tag = "global_step%d" if args.deepspeed else "iter_%07d"


def all_asked(step):
    # whether any rank was asked to stop: all learn it in the same step
    meeting = Path(args.save).parent / "meeting"
    meeting.mkdir(parents=True, exist_ok=True)
    (meeting / f"{step}-{rank}.new").write_text("asked" if asked else "no")
    (meeting / f"{step}-{rank}.new").rename(meeting / f"{step}-{rank}")
    while len(said := [path.read_text() for path in meeting.glob(f"{step}-?")]) < world:
        time.sleep(0.005)
    return "asked" in said


def save(step):
    folder = Path(args.save) / (tag % step)
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / f"__{rank}_0.distcp").write_bytes(bytes([rank, step % 256]) * 500)
    if rank == world - 1:
        print(f"  successfully saved checkpoint from iteration {step:7d} to {args.save} [ t 1/1, p 1/1 ]", flush=True)
    if rank == 0:
        (folder / "common.pt").write_text(json.dumps({"step": step}))
        while len(list(folder.glob("model/*.distcp"))) < world:
            time.sleep(0.01)
        (Path(args.save) / "latest_checkpointed_iteration.txt").write_text(str(step))


step = 0
if args.load:
    step = int((Path(args.load) / "latest_checkpointed_iteration.txt").read_text())
    found = Path(args.load) / (tag % step)
    assert json.loads((found / "common.pt").read_text()) == {"step": step}
    assert (found / "model" / f"__{rank}_0.distcp").read_bytes() == bytes([rank, step % 256]) * 500
    assert sorted(p.name for p in found.rglob("*") if p.is_file()) == ["__%d_0.distcp" % r for r in range(world)] + ["common.pt"]
    if args.deepspeed:
        assert (Path(args.load) / "latest").read_text() == tag % step
while step < int(args.train_iters):
    step += 1
    time.sleep(pace)
    if rank == world - 1:
        batch = int(args.global_batch_size)
        loss = float("nan") if os.environ.get("FAKE_NAN_AT") == str(step) else 4 / step
        print(
            f" [2026-08-22 10:00:00.000000] iteration {step:8d}/{int(args.train_iters):8d} |",
            f"consumed samples: {step * batch:12d} | elapsed time per iteration (ms): 50.0 |",
            f"throughput per GPU (TFLOP/s/GPU): 400.0 | learning rate: {1e-3:.6E} | global batch size: {batch:5d} |",
            f"lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {1 / step:.3f} |",
            "number of skipped iterations:   0 | number of nan iterations:   0 |",
            flush=True,
        )
    if step == die_at:
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", file=sys.stderr, flush=True)
        sys.exit(1)
    stop = all_asked(step)
    if step % int(args.save_interval) == 0 or step == int(args.train_iters) or stop:
        save(step)
    if stop:
        sys.exit(0)
"""
CONVERTER = """
import shutil, sys
from pathlib import Path

checkpoint, config, output, weights = map(Path, sys.argv[1:])
step = int((checkpoint / "latest_checkpointed_iteration.txt").read_text())
assert len(list(checkpoint.glob(f"*{step}/model/*.distcp"))) and (config / "config.json").exists()
shutil.copyfile(weights, output / "model.safetensors")
"""


def write_checkout(folder):
    """Returns the folder: what `execution.megatron.checkout` names."""
    folder.mkdir()
    head = f"FLAGS, VALUES = {FLAGS!r}, {VALUES!r}\n"
    (folder / "pretrain_gpt.py").write_text(head + textwrap.dedent(PROGRAM))
    (folder / "convert.py").write_text(CONVERTER)
    return folder


def converter(checkout, shapes):
    """A command for `execution.megatron.converter` that writes tensors of these shapes, whatever was trained."""
    weights = checkout / "model.safetensors"
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, weights)
    return ["{python}", str(checkout / "convert.py"), "{checkpoint}", "{config}", "{output}", str(weights)]
