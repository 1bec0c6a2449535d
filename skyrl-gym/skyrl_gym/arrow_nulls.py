"""Nulls of Parquet files and of datasets of the hub, which are Arrow tables.

Arrow gives every struct the fields of all structs of its column, null where a row never had them, and does not tell the
two apart. The rule, for rows, messages, tool calls, schemas and whatever else a row holds: a field that is null is not
there, so that a Parquet file reads as the JSON file of the same rows does. Nulls in lists, the `content` of a message
and nulls in text (arguments or tools as JSON text) stay.
"""


def remove_null_fields(value: object, feature: object = None) -> object:
    """Return a value of an Arrow table without null fields, at all depths.

    Args:
        feature: type of the value in a dataset of the hub. Values of its `Json` columns come from text, and stay.
    """
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        kinds = feature if isinstance(feature, dict) else {}
        return {
            name: remove_null_fields(each, kinds.get(name))
            for name, each in value.items()
            if each is not None or (name == "content" and value.get("role") is not None)
        }
    if isinstance(value, list):
        kind = getattr(feature, "feature", None)
        return [remove_null_fields(each, kind) for each in value]
    return value
