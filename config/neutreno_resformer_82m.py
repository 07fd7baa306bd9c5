# NeuTRENO on ResFormer: V_n is the mixed value, lambda half of 0.4.
from config.resformer_82m import *

out_dir = 'out/neutreno_resformer_82m'
neutreno = 0.2
