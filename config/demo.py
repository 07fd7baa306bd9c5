# A small byte model on the Python standard library, for two CPU cores: `make demo` trains it with
# three seeds as vanilla, ResFormer and SVFormer. 2.0M parameters; a step is 8 * 256 = 2,048 bytes,
# a run 100 steps = 0.2M bytes, 50 to 80 seconds of one core.
# $ python prepare_slimpajama.py --source=stdlib --tokenizer=bytes --tokens=0 --out=data/stdlib
# $ python train.py config/demo.py --v_residual=True
out_dir = 'out/demo'
dataset = 'stdlib'

n_layer, n_head, n_embd = 8, 4, 128
vocab_size = 320  # 256 bytes and <|endoftext|>, padded to a multiple of 64
block_size = 256
batch_size = 8
gradient_accumulation_steps = 1

max_iters = 100
learning_rate, min_lr = 2e-3, 2e-4
warmup_iters = 10
eval_interval = 0  # at the end only
eval_iters = 0  # the whole validation split, 0.24M bytes; `make demo` takes 0.03M of them
compile = False  # compiling takes longer than training so small a model
