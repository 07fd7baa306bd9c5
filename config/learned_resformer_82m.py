# ResFormer whose mixing weights are learned, starting from 0.5 and 0.5 (validation loss in the
# paper's later version: 2.705).
from config.resformer_82m import *

out_dir = 'out/learned_resformer_82m'
residual_weights = 'learned'
