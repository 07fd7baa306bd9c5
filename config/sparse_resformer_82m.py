# ResFormer in the last three layers only: 5 V_1 + V_n (validation loss in the paper's later version:
# 2.687).
from config.resformer_82m import *

out_dir = 'out/sparse_resformer_82m'
residual_layers = (5, 6, 7)
residual_lambda = (5.0, 1.0)
