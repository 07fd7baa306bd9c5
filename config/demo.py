# A small byte model on the Python standard library, for two CPU cores: `make demo` trains it as
# vanilla, ResFormer and SVFormer on the same batches. 2.0M parameters; 16 * 256 = 4,096 bytes a
# step.
# $ python prepare_slimpajama.py --source=stdlib --tokenizer=bytes --tokens=0 --out=data/stdlib
# $ python train.py config/demo.py --out_dir=out/demo/resformer --v_residual=True
out_dir = 'out/demo/vanilla'
dataset = 'stdlib'

n_layer, n_head, n_embd = 8, 4, 128
vocab_size = 320  # 256 bytes and <|endoftext|>, padded to a multiple of 64
block_size = 256
batch_size = 16
gradient_accumulation_steps = 1

max_iters = 200
learning_rate, min_lr = 2e-3, 2e-4
warmup_iters = 20
eval_interval = 100
eval_iters = 2
compile = False  # compiling takes longer than training so small a model
