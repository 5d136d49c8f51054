#!/usr/bin/env bash
# A fleet of peers on a cluster that may take its nodes back: Slurm, one peer for each task of the array.
#
#   echo 'cocktail://...' > ~/.cocktail-run-url && chmod 600 ~/.cocktail-run-url
#   sbatch slurm.sh
#
# The nodes need a way out to the hub's port (29400), nothing needs a way in.
#SBATCH --job-name=cocktail-peer
#SBATCH --array=1-8
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60
#SBATCH --output=cocktail-%A-%a.log
set -uo pipefail

# Files of this job: the key pair and the fetched model are kept for its next start on whichever node.
export COCKTAIL_HOME="${COCKTAIL_HOME:-$HOME/.cocktail/${SLURM_ARRAY_JOB_ID:-0}-${SLURM_ARRAY_TASK_ID:-0}}"

# Slurm tells this shell alone; cocktail says goodbye within 22 s, hands its work over and ends with 75.
peer= told=
trap 'told=yes; [ -z "$peer" ] || kill -TERM "$peer"' TERM
cocktail join @"$HOME/.cocktail-run-url" --yes --progress plain --wait 10m --name "slurm-${SLURM_ARRAY_TASK_ID:-0}" &
peer=$!
[ -z "$told" ] || kill -TERM "$peer"
wait "$peer"
status=$?
while kill -0 "$peer" 2> /dev/null; do # the signal ended the first wait
  wait "$peer"
  status=$?
done
trap - TERM
if [ "$status" -eq 75 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID:-}_${SLURM_ARRAY_TASK_ID:-}"
fi
exit "$status"
