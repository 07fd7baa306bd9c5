#!/usr/bin/env bash
# The paper's main comparison on one machine with eight GPUs: vanilla, ResFormer and SVFormer, 82M
# parameters, 20B tokens of SlimPajama each.
#
# $ bash runs/82m_8gpu.sh                 # from a fresh clone; a second call goes on where it stopped
#
# Preparation downloads 56 GB, takes about two core-hours, and needs 82 GB of disk while it works. A
# training takes 7 H100-hours at the speed of one GPU (results/speed/README.md). SlimPajama may be gone
# from the hub (docs/data.md); with --source=FOLDER below, any folder of texts serves.
#
# One seed of each model gives numbers, but no verdict. For a verdict, run the same models as arms of
# compare.py, with several seeds. It trains runs of its own, and those below do not count among them, on
# all eight GPUs, one after the other:
#   python compare.py config/vanilla_82m.py --name=82m --seeds=3 --gpus=8 \
#       --arms="vanilla; resformer: v_residual=True; svformer: share_v=True"
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
# First, because without a GPU `make setup` installs a torch for CPUs.
[ "$(nvidia-smi --list-gpus | wc -l)" -ge 8 ] || { echo 'error: this machine has no eight GPUs' >&2; exit 1; }
make setup

python prepare_slimpajama.py

for model in vanilla resformer svformer; do
    torchrun --standalone --nproc_per_node=8 train.py "config/${model}_82m.py" --init_from=auto --device=cuda
done

python evaluate.py loss out/vanilla_82m out/resformer_82m out/svformer_82m --out=out/losses_82m.json
python compare.py out/vanilla_82m out/resformer_82m out/svformer_82m --name=82m_one_seed
