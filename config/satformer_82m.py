# SATFormer (arXiv:2605.03953): V_1 is added, as much as a ReLU gate of each token and head says.
from config.vanilla_82m import *

out_dir = 'out/satformer_82m'
v_residual = True
residual_weights = 'relu'
