# CLA with 2 of 8 KV heads: an eighth of the KV cache (Fig. 10).
from config.cla_82m import *

out_dir = 'out/cla_gqa_82m'
n_kv_head = 2
