# ResFormer with constant weights: 2 V_1 + V_n (validation loss in the paper's later version: 2.700).
from config.resformer_82m import *

out_dir = 'out/constant_resformer_82m'
residual_lambda = (2.0, 1.0)
