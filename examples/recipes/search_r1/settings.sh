# Sourced by the scripts of this folder: settings that training and evaluation share.
: "${DATA_DIR:=$HOME/data/searchR1}" "${INFERENCE_BACKEND:=vllm}" "${ENGINE_MEMORY:=0.5}" "${MAX_TURNS:=4}"
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"
search=(environment.env_class=search environment.skyrl_gym.max_env_workers=16 environment.skyrl_gym.search.topk=3
  environment.skyrl_gym.search.search_url="${SEARCH_URL:-http://127.0.0.1:8000/retrieve}"
  trainer.max_prompt_length=2048 trainer.eval_batch_size=256
  generator.max_turns="$MAX_TURNS" generator.max_input_length=4096 generator.use_conversation_multi_turn=false
  generator.sampling_params.max_generate_length=500
  generator.{sampling_params,eval_sampling_params}.stop='["</search>","</answer>"]'
  generator.eval_sampling_params.temperature=0.0)
