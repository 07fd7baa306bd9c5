# 33M parameters (7.6M without embeddings) on a SlimPajama-like corpus of 62M GPT-NeoX tokens, for
# two CPU cores: 8 * 512 = 4,096 tokens a step, 600 steps = 2.5M tokens, 20 to 50 minutes.
# $ python prepare_slimpajama.py --source=FOLDER --tokenizer=TOKENIZER.json --tokens=0 --out=data/slimpajama_mini
# $ python train.py config/mini.py --out_dir=out/mini/resformer --v_residual=True
out_dir = 'out/mini/vanilla'
dataset = 'slimpajama_mini'

n_layer, n_head, n_embd = 8, 4, 256
block_size = 512
batch_size = 8
gradient_accumulation_steps = 1

max_iters = 600
learning_rate, min_lr = 1e-3, 1e-4
warmup_iters = 50
eval_interval = 200
eval_iters = 4
dtype = 'bfloat16'  # on a CPU 1.5 times float32's speed
