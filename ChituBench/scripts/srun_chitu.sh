#!/usr/bin/env bash
# chitu run under Slurm, on one node or several: srun starts one process a GPU, and each takes its place from Slurm's environment.
#
#   sbatch --nodes 2 --gpus-per-node 8 ChituBench/scripts/srun_chitu.sh \
#       --model FLUX.1-dev --prompt "a red apple" --ulysses 8 --gather 2 --output outputs/apple
#   ChituBench/scripts/srun_chitu.sh ...      # inside an allocation made by salloc
#
# Everything after the script's name goes to `chitu run`. The address is the first node of the allocation and the port follows
# from the job's number; MASTER_ADDR and MASTER_PORT override them. Keep Ulysses within a node: it is the innermost axis.

#SBATCH --job-name chitu
#SBATCH --exclusive

set -euo pipefail

nodes="${SLURM_JOB_NUM_NODES:?start me with sbatch, or inside an allocation made by salloc}"
gpus="${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}"

# --kill-on-bad-exit: a rank that dies takes the step down with it. --gpu-bind none: every process sees the node's GPUs, and
# takes the one of its local rank.
exec srun --nodes "$nodes" --ntasks "$((nodes * gpus))" --ntasks-per-node "$gpus" \
    --kill-on-bad-exit=1 --gpu-bind none --export ALL,OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" \
    "${CHITU:-chitu}" run "$@"
