#!/bin/bash
# sbatch jobs/slurm.sh my.yaml [KEY=VALUE...]: one task on each machine, which starts a rank for each of its GPUs.
# A job that is requeued, or submitted again, goes on from the last whole checkpoint.
#SBATCH --job-name=upweight
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=upweight-%j.log
set -eu
export HEAD
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The signal comes two minutes before the end: a checkpoint is written, and the run ends by itself.
srun --kill-on-bad-exit=1 bash -c 'exec upweight train "$@" --resume \
  --nodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --master-address "$HEAD"' upweight "$@"
