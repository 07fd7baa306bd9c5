# Every layer borrows half of the first layer's value heads (SkipV1Former, arXiv:2510.16807).
from config.vanilla_82m import *

out_dir = 'out/half_svformer_82m'
share_v = True
share_v_heads = 4
