#!/usr/bin/env bash
# What a GPU is wanted for, step by step, on machines of which nothing survives but the folder OUT.
#
# $ bash tests/gpu.sh list                       # the steps, most important first
# $ bash tests/gpu.sh bench_82m 10 results/gpu   # one step, in at most 10 minutes
# $ bash tests/gpu.sh all 28 results/gpu         # every step that has not run yet and fits
# $ bash tests/gpu.sh all 28 OUT gpu.tar.gz      # the same on a new machine, after an earlier call
#
# bash tests/gpu.sh STEP MINUTES OUT [EARLIER]
# STEP is a name, several with commas between them, or all. MINUTES is what the whole call has: a
# step that may need more than is left is not started. OUT gets one archive, gpu.tar.gz, which is
# written again after each step: the log and the numbers of every step, and in steps.txt their exit
# status. While a step runs, its log and its rows so far are in OUT/STEP. There are never more than
# 8 files in OUT. EARLIER is the archive of an earlier call (else the one in OUT): `all` does not
# repeat its steps, not even those that failed; a step that is named runs again.
#
# The benches need torch and numpy; with transformers, they have hf rows, too. Checks need pytest.
# Training needs data/$DATASET, or SOURCE and TOKENIZER as in prepare_slimpajama.py, to prepare it
# from. TASKS is the folder of the zero-shot tasks' files, for the step compare; they need lm_eval.
# PROCESSES is how many the step ddp starts; one per GPU if it is not set.
#
# Where .git did not travel along, COMMIT says of which commit the results are: what
# `git describe --always --dirty` prints where the copy was made.
#
# A rehearsal of everything, with tiny shapes on the CPU, takes some minutes:
# $ REHEARSAL=1 bash tests/gpu.sh all 90 out/rehearsal
set -u

# name, minutes that it may take, what it does
STEPS='
correctness_losses     8  FP16 losses and gradients are those of fp32 on the CPU
correctness_compiled   9  compiled gradients are eager ones, for every variant
bench_82m              8  vanilla, ResFormer, SVFormer and transformers; a profile of each
kernels                8  attention kernels
memory                 9  the activation budget of the compiler, checkpointing
train_vanilla          9  400 steps of 82M; the loss per domain
train_resformer        9  likewise
train_svformer         9  likewise
compare                9  the runs that are on this machine: losses, entropy, spectrum, similarity
correctness_decoding   5  decoding with CUDA graphs is the full forward pass
correctness_runs       8  a run learns, stops and resumes
correctness_neutreno_resformer 9 kernels, modes and checkpointing take the same step
correctness_cla_gqa    9  likewise
bench_180m             9  vanilla and transformers; a profile of each
bench_468m             9  likewise
variants_1             9  training steps of the other variants, each step with vanilla
variants_2             9  likewise
variants_3             9  likewise
decode_2048            8  prefill and decoding at 2,048 tokens
decode_16384           9  likewise at 16,384
decode_65536           9  likewise at 65,536
tuning                 9  CUDA graphs, max-autotune
ddp                    9  DistributedDataParallel on all GPUs
train_neutreno         9  as train_vanilla
train_denseformer      9  likewise
train_learned_resformer 9 likewise
'

# The commands of a step. What it writes to $HERE can be had while it runs, what it writes to $THERE
# afterwards.
commands() {
    local attention=vanilla+attention=flash,vanilla+attention=cudnn
    local stored=vanilla+activation_memory_budget=0.9,vanilla+activation_checkpointing=True
    local modes=vanilla+mode=reduce-overhead,vanilla+mode=max-autotune-no-cudagraphs
    case $1 in
    correctness_losses) check tests/test_gpu.py -k losses ;;
    correctness_compiled) check tests/test_gpu.py -k eager_ones ;;
    correctness_decoding) check tests/test_gpu.py -k decoding ;;
    correctness_runs) check tests/test_gpu.py -k a_run ;;
    correctness_*) check tests/test_bench.py -k "same_step and ${1#correctness_}" ;;
    bench_82m) bench --batch_size=32 $(peers) --profile="$THERE" ;;
    bench_180m) bench_size 180m --batch_size=16 ;;
    # Batch 8 fits without recomputing.
    bench_468m) bench_size 468m --batch_size=8 --activation_memory_budget=1 ;;
    kernels) bench_few --variants="vanilla,$attention" ;;
    memory) bench_few --variants="vanilla,$stored" ;;
    tuning) bench_few --variants="vanilla,$modes" ;;
    ddp) bench_ddp ;;
    variants_1) bench_few --variants=vanilla,constant_resformer,sparse_resformer,denseformer ;;
    variants_2) bench_few --variants=vanilla,learned_resformer,neutreno,neutreno_resformer,cla ;;
    variants_3) bench_few --variants=vanilla,gqa,mqa,svformer_cla,svformer_gqa,cla_gqa ;;
    decode_*) bench_decode "${1#decode_}" ;;
    train_*) prepare && train "${1#train_}" ;;
    compare) compare ;;
    esac
}

check() { "$PYTHON" -m pytest -q -p no:cacheprovider "$@"; }

bench() { "$PYTHON" $LAUNCHER bench.py "$@" $SMALL $SMALL_BENCH --out="$HERE/rows.json"; }
bench_few() { bench --batch_size=32 --rounds=5 "$@"; }
bench_ddp() {
    local LAUNCHER="-m torch.distributed.run --standalone --nproc_per_node=$PROCESSES"
    bench_few
}
bench_size() {
    bench "config/vanilla_$1.py" "${@:2}" --variants=vanilla $(peers) --rounds=5 --profile="$THERE"
}
bench_decode() {
    "$PYTHON" bench.py decode --variants=vanilla,resformer,svformer,cla,svformer_gqa \
        --contexts="($1,)" --block_size="$1" --batch_sizes="(1, 32)" --rounds=3 \
        $SMALL $SMALL_DECODE --out="$HERE/rows.json"
}
peers() { "$PYTHON" -c 'import transformers' > /dev/null 2>&1 && echo --peers=hf; }

prepare() {
    [ -e "data/$DATASET/meta.json" ] && return
    "$PYTHON" prepare_slimpajama.py --source="$SOURCE" ${TOKENIZER:+--tokenizer="$TOKENIZER"} \
        --tokens=0 --out="data/$DATASET"
}

# 400 steps of 8 x 32 x 2,048 tokens are 210M tokens, with the paper's schedule to scale.
train() {
    "$PYTHON" train.py "config/$1_82m.py" --init_from=auto --dataset="$DATASET" \
        --gradient_accumulation_steps=8 --batch_size=32 --max_iters="$ITERATIONS" \
        --warmup_iters=10 --eval_interval=100 --save_interval=100 --eval_iters=2 \
        $SMALL $SMALL_TRAIN --out_dir="$RUNS/$1" &&
        "$PYTHON" evaluate.py loss "$RUNS/$1" --out="$HERE/loss.json"
}

# Checkpoints are too large for OUT: whatever needs several of them needs them on one machine.
compare() {
    local runs failed=0 kind
    runs=$(finished_runs)
    "$PYTHON" evaluate.py loss $runs --out="$HERE/loss.json" || failed=1
    for kind in entropy spectrum similarity; do
        "$PYTHON" -m paper.analyze $kind $runs $SMALL_ANALYZE --out="$THERE/$kind" || failed=1
    done
    if [ -n "$TASKS" ]; then
        "$PYTHON" evaluate.py tasks $runs --data_dir="$TASKS" --out="$HERE/tasks.json" || failed=1
    fi
    return $failed
}

finished_runs() {
    local model run
    for model in vanilla resformer svformer neutreno denseformer learned_resformer; do
        run=$RUNS/$model
        if [ -e "$run/ckpt_$ITERATIONS.pt" ] && grep -q "\"step\": $ITERATIONS," "$run/log.jsonl"; then
            echo "$run"
        fi
    done
}

# What a step lacks on this machine; nothing where it can start.
lacks() {
    case $1 in
    train_*)
        [ -e "data/$DATASET/meta.json" ] || [ -n "$SOURCE" ] || echo "data/$DATASET, or SOURCE"
        ;;
    compare) [ -n "$(finished_runs)" ] || echo 'the runs of the training steps' ;;
    esac
}

run() {  # name, minutes
    local left=$((END - SECONDS)) start=$SECONDS status missing
    if [ $left -lt $((60 * $2)) ]; then
        echo "$1: not started: it may take $2 minutes, $((left / 60)) are left"
        return 1
    fi
    missing=$(lacks "$1")
    if [ -n "$missing" ]; then
        echo "$1: not started: it needs $missing"
        return 1
    fi

    export HERE=$OUT/$1 THERE=$RESULTS/$1
    rm -rf "$THERE" "${THERE}_interrupted"
    [ -d "$HERE" ] && mv "$HERE" "${THERE}_interrupted"
    mkdir -p "$HERE" "$THERE"
    timeout --kill-after=20 "${2}m" bash -uc 'commands "$1"' bash "$1" > "$HERE/log.txt" 2>&1
    status=$?

    [ -e "$RUNS/${1#train_}/log.jsonl" ] && cp "$RUNS/${1#train_}"/{log.jsonl,config.json} "$THERE"
    mv "$HERE"/* "$THERE"
    rmdir "$HERE"
    echo "$1: exit status $status after $((SECONDS - start)) s" | tee -a "$RESULTS/steps.txt"
    archive
    return $status
}

archive() {
    local name=$OUT/gpu.tar.gz
    tar czf "$name.tmp" -C "$RESULTS" . && mv "$name.tmp" "$name"
    if [ "$(stat -c %s "$name")" -gt $((16 * 1024 * 1024)) ]; then
        echo "warning: $name is larger than 16 MiB; some machines do not give back larger files"
    fi
}

main() {
    local wanted=${1:-help}
    if [ "$wanted" = list ]; then
        echo "$STEPS" | sed '/^$/d'
        return
    fi
    if [ $# -lt 3 ]; then
        sed -n '2,/^set/s/^# \?//p' "$0"
        return 2
    fi

    mkdir -p "$3"
    OUT=$(realpath "$3")
    END=$((SECONDS + 60 * $2))
    RESULTS=$(mktemp -d)
    trap 'rm -rf "$RESULTS"' EXIT
    local earlier=${4:-$OUT/gpu.tar.gz} name minutes rest status=0
    if [ -e "$earlier" ]; then
        tar xzf "$earlier" -C "$RESULTS" || return 2
    elif [ $# -ge 4 ]; then
        echo "there is no $earlier" >&2
        return 2
    fi
    cd "$(dirname "$0")/.."
    if [ -z "$COMMIT" ] && ! git describe --always > /dev/null 2>&1; then
        echo 'warning: without .git and COMMIT, the results do not say of which commit they are'
    fi

    for name in ${wanted//,/ }; do
        if [ "$name" != all ] && ! echo "$STEPS" | grep -q "^$name "; then
            echo "there is no step $name; see: bash tests/gpu.sh list" >&2
            return 2
        fi
    done
    while read -r -u 3 name minutes rest; do
        if [ "$wanted" = all ]; then
            grep -qs "^$name:" "$RESULTS/steps.txt" && continue
        elif [[ ,$wanted, != *,$name,* ]]; then
            continue
        fi
        run "$name" "$minutes" || status=1
    done 3< <(echo "$STEPS" | sed '/^$/d')
    return $status
}

export PYTHONUNBUFFERED=1
export PYTHON=${PYTHON:-python3} DATASET=${DATASET:-slimpajama_mini} RUNS=${RUNS:-out/gpu}
export SOURCE=${SOURCE:-} TOKENIZER=${TOKENIZER:-} TASKS=${TASKS:-} ITERATIONS=${ITERATIONS:-400}
export COMMIT=${COMMIT:-} LAUNCHER='' PROCESSES=${PROCESSES:-gpu}
export SMALL='' SMALL_TRAIN='' SMALL_BENCH='' SMALL_DECODE='' SMALL_ANALYZE=--sequences=100
if [ -n "${REHEARSAL:-}" ]; then
    export CUDA_VISIBLE_DEVICES='' DATASET=rehearsal SOURCE=config TOKENIZER=bytes ITERATIONS=3
    export PROCESSES=2
    export RUNS=out/gpu_rehearsal SMALL_ANALYZE='--sequences=4 --length=64'
    export SMALL='--n_head=8 --n_embd=32 --block_size=64 --vocab_size=320 --device=cpu'
    export SMALL_TRAIN='--batch_size=2 --compile=False'
    export SMALL_BENCH='--batch_size=2 --rounds=2 --warmup=1'
    export SMALL_DECODE='--contexts=(48,) --new_tokens=8 --rounds=1'
fi
export -f commands check bench bench_few bench_ddp bench_size bench_decode peers
export -f prepare train compare finished_runs
main "$@"
