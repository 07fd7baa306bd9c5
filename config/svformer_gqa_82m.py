# SVFormer with 2 of 8 KV heads: about an eighth of the KV cache, (L + 1) / 8L (Fig. 10).
from config.svformer_82m import *

out_dir = 'out/svformer_gqa_82m'
n_kv_head = 2
