# Attention Residuals (arXiv:2603.15031): each block reads a softmax over what all blocks before it added.
from config.vanilla_82m import *

out_dir = 'out/attn_res_82m'
attn_res = True
