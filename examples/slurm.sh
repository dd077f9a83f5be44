#!/bin/bash
#SBATCH --job-name=gossip
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=USR1@90
#SBATCH --no-kill
# With GPUs: --ntasks-per-node=8 --gpus-per-node=8, and accelerator="gpu" in slurm.py. Not --gpus-per-task: Lightning wants each
# task to see all GPUs of its node.
# --signal: Lightning saves and queues the job again 90 s before its time is over.
# --no-kill, and the two options of srun: a lost node or a failed task does not end the others.
srun --kill-on-bad-exit=0 --wait=0 python slurm.py
