# The normed embedding is mixed into what each block reads, with learned weights (nanochat, modded-nanogpt).
from config.vanilla_82m import *

out_dir = 'out/x0_82m'
x0_residual = True
