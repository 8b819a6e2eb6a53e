#!/bin/bash

# Parameters
#SBATCH --account='a b'
#SBATCH --array=0-7%1
#SBATCH --chdir='/shared/it'"'"'s 100% mine'
#SBATCH --cpus-per-task=8
#SBATCH --export=ALL
#SBATCH --gres=gpu:h100:2
#SBATCH --job-name=slurmrl-01234567-3-trainer
#SBATCH --mem=32G
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/shared/it'"'"'s 100%% mine/logs/trainer/slurm-%A_%a.out'
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=1:00:00

# setup
#SBATCH --exclusive
trap '' USR1
trap '(sleep 3; kill -USR2 $$) &' USR2
slurmrl_run='/shared/it'"'"'s 100% mine'
slurmrl_script='/shared/it'"'"'s 100% mine/submissions/3/trainer.sh'
slurmrl_number=3
slurmrl_job=slurmrl-01234567-3-trainer
slurmrl_exclude=''
slurmrl_first_s=5
slurmrl_longest_s=300
slurmrl_most=20
slurmrl_several=3
slurmrl_fail() { PYTHONPATH='/shared/it'"'"'s 100% mine/code' PYTHONDONTWRITEBYTECODE=1 '/opt/my python' -P -m slurmrl.workers.supervisor --run '/shared/it'"'"'s 100% mine' --submission 3 --group trainer --launcher srun --failed "$1"; }
# leave.sh
trap 'slurmrl_told=1; exit 143' TERM
trap 'slurmrl_ended $? "${BASH_COMMAND:-}"' EXIT
slurmrl_setup=yes
command -v module >/dev/null || [ ! -r /etc/profile ] || {
    slurmrl_path=$PATH; . /etc/profile; PATH=$slurmrl_path:$PATH; }
module load cuda
slurmrl_setup=
unset IFS
command -v srun >/dev/null || export PATH=$PATH:$slurmrl_own_path
export PYTHONPATH='/shared/it'"'"'s 100% mine/code'"${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONDONTWRITEBYTECODE=${PYTHONDONTWRITEBYTECODE-1}
slurmrl_said=$(timeout 300 '/opt/my python' -P -c 'import slurmrl.workers.supervisor.__main__' 2>&1) || slurmrl_leave "$slurmrl_said"
slurmrl_block=
env --block-signal=USR2 true 2>/dev/null && slurmrl_block='env --block-signal=USR2'
trap '' USR2

# command
export SUBMITIT_EXECUTOR=slurm
exec $slurmrl_block '/opt/my python' -P -m slurmrl.workers.supervisor --run '/shared/it'"'"'s 100% mine' --submission 3 --group trainer --launcher srun
