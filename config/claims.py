# The paper's claims on real text at a size for one CPU core: 0.52M parameters on bytes of a
# SlimPajama-like corpus, 16 * 256 = 4,096 bytes a step, 1,250 steps = 5.1M bytes, 9 to 34 minutes.
# The schedule is the paper's, scaled: linear warm-up over the first 2%, cosine to a tenth. The rate
# suits vanilla and SVFormer, and cannot be told apart from ResFormer's best (results/rates of
# commit 1b5cb6c).
# $ python prepare_slimpajama.py --source=FOLDER --tokenizer=bytes --tokens=0 --out=data/slimpajama_mini_bytes
# $ python train.py config/claims.py --out_dir=out/claims/resformer_1 --v_residual=True --seed=1
out_dir = 'out/claims/vanilla_1'
dataset = 'slimpajama_mini_bytes'
seed = 1

n_layer, n_head, n_embd = 8, 4, 64
vocab_size = 320  # 256 bytes and <|endoftext|>, padded to a multiple of 64
block_size = 256
batch_size = 16
gradient_accumulation_steps = 1

max_iters = 1250
learning_rate, min_lr = 6e-3, 6e-4
warmup_iters = 25
eval_interval = 0  # at the end only
eval_iters = 32  # of 16 windows: about a sixth of each domain's validation text
