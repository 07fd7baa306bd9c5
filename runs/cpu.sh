#!/usr/bin/env bash
# An evening on a laptop: vanilla, ResFormer and SVFormer with 2.0M parameters, on the Python standard
# library. Each model first finds its own learning rate, and five other seeds then judge it.
#
# $ bash runs/cpu.sh                      # from a fresh clone; a second call goes on where it stopped
#
# 33 runs of 600 steps, up to six more if the best rate is the highest or the lowest: 5 to 6 hours of
# processor time (estimated), about three hours on two cores. Ctrl-C saves every run.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
make setup

python prepare_slimpajama.py --source=stdlib --tokenizer=bytes --tokens=0 --out=data/stdlib

python compare.py config/demo.py --name=evening --max_iters=600 --warmup_iters=72 \
    --rates="(1e-3, 2e-3, 4e-3)" --seeds=5 --contrasts=svformer-resformer \
    --arms="vanilla; resformer: v_residual=True; svformer: share_v=True"

for run in out/compare/evening/resformer_lr*_seed1; do
    python sample.py --out_dir="$run" --start="def " --temperature=0.6
done
