#!/usr/bin/env bash
# What a GPU is wanted for, most important first, within the minutes given. Small files come to OUT; called again, it goes
# on where it stopped. Needs data/$DATASET (or SOURCE and TOKENIZER to prepare it from); TASKS: the zero-shot tasks' files.
# $ bash tests/gpu.sh 28 results/gpu
# A trial without a GPU: SMALL="--n_head=8 --n_embd=32 --block_size=64 --batch_size=2 --compile=False" STEPS=3 bash tests/gpu.sh 9 out/trial
set -u
cd "$(dirname "$0")/.."
MINUTES=$1 OUT=$2 DATASET=${DATASET:-slimpajama_mini} SMALL=${SMALL:-} STEPS=${STEPS:-400} PYTHON=${PYTHON:-python}
END=$((SECONDS + 60 * MINUTES)) DONE=out/gpu/done
mkdir -p "$OUT" "$DONE"

step() {  # name, command: once, in what is left of the time
    local name=$1 left=$((END - SECONDS)); shift
    if [ -e "$DONE/$name" ] || [ $left -lt 10 ]; then return; fi
    timeout "$left" "$@" > "$OUT/$name.log" 2>&1 && touch "$DONE/$name"
    echo "$name: exit status $?, $((END - SECONDS)) s left" | tee -a "$OUT/steps.txt"
}
bench() { step "$1" "$PYTHON" bench.py "${@:2}" $SMALL --out="$OUT/$1.json"; }

[ -e "data/$DATASET/meta.json" ] || step prepare "$PYTHON" prepare_slimpajama.py --source="$SOURCE" --tokenizer="$TOKENIZER" \
    --tokens=0 --out="data/$DATASET"
step correctness "$PYTHON" -m pytest -q tests/test_gpu.py tests/test_tools.py -k "gpu or lever_takes"
bench bench_82m --batch_size=32 --peers=hf
bench bench_variants --batch_size=32 --variants=all --rounds=5
bench bench_levers --batch_size=32 --rounds=5 --profile="$OUT" --variants=vanilla,vanilla:flash,vanilla:cudnn,vanilla:chunk=2048,vanilla:chunk=16384,vanilla:mode=reduce-overhead,vanilla:mode=max-autotune-no-cudagraphs,vanilla:checkpointed
# 400 steps of 8 x 32 x 2,048 tokens: 210M, the corpus three times over; the paper's schedule, scaled
for model in vanilla resformer svformer neutreno denseformer learned_resformer; do
    run=out/gpu/$model
    step "train_$model" "$PYTHON" train.py "config/${model}_82m.py" --init_from=auto --dataset="$DATASET" \
        --gradient_accumulation_steps=8 --batch_size=32 --max_iters="$STEPS" --lr_decay_iters=0 --warmup_iters=10 \
        --eval_interval=100 --eval_iters=2 $SMALL --out_dir="$run"
    [ -e "$run/log.jsonl" ] && mkdir -p "$OUT/$model" && cp "$run/log.jsonl" "$run/config.json" "$OUT/$model"
    if [ "$model" = svformer ]; then  # checkpoints do not come back: what needs them is measured here
        runs="out/gpu/vanilla out/gpu/resformer out/gpu/svformer"
        step loss "$PYTHON" evaluate.py loss --out_dir=$runs --out="$OUT/loss.json"
        for kind in entropy spectrum similarity; do
            step $kind "$PYTHON" analyze.py $kind --out_dir=$runs --sequences=100 --out="$OUT/$kind"
        done
        [ -n "${TASKS:-}" ] && step tasks "$PYTHON" evaluate.py tasks --out_dir=$runs --data_dir="$TASKS" --out="$OUT/tasks.json"
        step relative "$PYTHON" plot.py relative $runs --out="$OUT/relative.png"
    fi
done
bench bench_180m config/vanilla_180m.py --batch_size=16 --peers=hf --rounds=5
bench bench_468m config/vanilla_468m.py --batch_size=8 --peers=hf --rounds=5
step decode "$PYTHON" bench.py decode --variants=vanilla,resformer,svformer,cla,svformer_gqa --batch_sizes="(1, 32)" \
    --contexts="(2048, 16384, 65536)" --block_size=65536 --memory_gib=16 --rounds=3 --out="$OUT/decode.json"
