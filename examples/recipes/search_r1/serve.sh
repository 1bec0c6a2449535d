#!/usr/bin/env bash
# The retrieval server of the published figures, on port 8000: Wikipedia of 2018 in passages (wiki-18.jsonl), e5-base-v2,
# exact search in a flat index. It takes about 60 GB of memory; the first start computes the index (a GPU helps: --device
# cuda), or serves an existing one (--index_path e5_Flat.index). With --index bm25 expect lower figures, and report that.
#   CORPUS=~/data/wiki-18.jsonl bash examples/recipes/search_r1/serve.sh [option ...]
source "$(dirname "$0")/settings.sh"
exec "$PYTHON" -m skyrl_gym.tools.retrieval --corpus "${CORPUS:-$HOME/data/wiki-18.jsonl}" --port 8000 --index dense \
  --retriever_model intfloat/e5-base-v2 --faiss_factory Flat --index_path "${INDEX_PATH:-$HOME/data/wiki-18_e5}" "$@"
