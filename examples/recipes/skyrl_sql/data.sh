#!/usr/bin/env bash
# The 653 questions that SkyRL-SQL trains on (two splits), and the five Spider sets of its table, all questions of each.
# The databases are those of OmniSQL's release (data.zip), unpacked to $DB_PATH: SynSQL-2.5M, spider, Spider-DK,
# Spider-Syn, spider-realistic. The prompts of the five sets have the words of the training rows.
source "$(dirname "$0")/settings.sh"
build() { "$PYTHON" "$root/examples/text2sql/text2sql_dataset.py" --db_path "$DB_PATH" "$@"; }
build --output_dir "$DATA_DIR"

# evaluation_set NAME FAMILY FILE [option ...]
evaluation_set() {
  local name="$1" family="$2" file="$3"
  shift 3
  build --output_dir "$DATA_DIR/$name" --input "$DB_PATH/$file" --only_validation --keep_empty \
    --data "$family" --data_source "$name" --prompt_like "$DATA_DIR/train.parquet" "$@"
}
evaluation_set spider_dev spider spider/dev.json
evaluation_set spider_test spider_test spider/test.json
evaluation_set spider_realistic spider spider-realistic/spider-realistic.json
evaluation_set spider_dk spider_dk Spider-DK/Spider-DK.json
evaluation_set spider_syn spider Spider-Syn/Spider-Syn/dev.json --question_column SpiderSynQuestion
