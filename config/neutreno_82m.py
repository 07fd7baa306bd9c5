# NeuTRENO (Eq. 8): U_n += lambda (V_1 - V_n).
from config.vanilla_82m import *

out_dir = 'out/neutreno_82m'
neutreno = 0.4
