"""Every Python with this folder on PYTHONPATH imports this module. The GPUs of a Slurm test bed are
files, so workers with GPUs compute on the CPU and accept a CPU build of torch.
"""

import sys

if "slurmrl.workers.worker" in sys.orig_argv:
    from slurmrl.tensors.parallel import device

    device.choose = lambda gpus: device.CPU
elif sys.orig_argv[1:3] == ["-m", "slurmrl"]:
    from slurmrl.desk import trial_checks

    trial_checks.torch_build = lambda: None
