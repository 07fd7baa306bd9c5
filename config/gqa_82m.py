# Grouped-query attention with 4 of 8 KV heads: half the KV cache (Fig. 10).
from config.vanilla_82m import *

out_dir = 'out/gqa_82m'
n_kv_head = 4
