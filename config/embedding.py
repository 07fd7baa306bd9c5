# The claims' models on tokens in place of bytes: 4,096 ids (a BPE of the corpus), 0.48M parameters
# in the blocks and 0.52M in embedding and lm_head, 16 * 256 = 4,096 tokens a step, 1,250 steps =
# 5.1M tokens of some 3.1 bytes each; about 10 minutes on one core. Everything else as claims.py.
# $ python prepare_slimpajama.py --source=FOLDER --tokenizer=TOKENIZER --tokens=0 --out=data/slimpajama_mini_4k
# $ python compare.py config/embedding.py --arms="vanilla; resformer: v_residual=True" --rates="(3e-3, 6e-3)"
from config.claims import *

out_dir = 'out/embedding/vanilla_1'
dataset = 'slimpajama_mini_4k'
vocab_size = 4096  # <|endoftext|> among them
