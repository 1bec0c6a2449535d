# Sourced by the scripts of this folder: settings that training and evaluation share.
: "${DATA_DIR:=$HOME/data/sql}" "${DB_PATH:=$DATA_DIR/db_files/data}" "${INFERENCE_BACKEND:=vllm}" "${ENGINE_MEMORY:=0.7}"
source "$(dirname "${BASH_SOURCE[0]}")/../../common.sh"

# turns N: N turns in one growing assistant message, the last one for the solution.
turns() {
  sql=(environment.env_class=text2sql environment.skyrl_gym.text2sql.db_path="$DB_PATH"
    trainer.max_prompt_length=6000 trainer.eval_batch_size=1024
    generator.max_turns="$1" generator.max_input_length="$([ "$1" -gt 1 ] && echo 29000 || echo 6000)"
    generator.use_conversation_multi_turn=false generator.sampling_params.max_generate_length=3000
    generator.{sampling_params,eval_sampling_params}.stop='["</sql>","</solution>"]'
    generator.eval_sampling_params.temperature=0.0)
}
