"""`experiment.dotted`: values by dotted name."""

from determined_amp.experiment.dotted import flat, leaves, put


def test_values_by_dotted_name_come_from_sections_and_return_to_their_keys():
    values = {"a": {"b": 1, "c": {"d": [2]}}, "e": None, "f.g": 3, "empty": {}}
    named = {"a.b": 1, "a.c.d": [2], "e": None, "f.g": 3}
    assert flat(values) == named
    again = {"empty": {}}
    for path, value in leaves(values):
        put(again, path, value)
    assert again == values
    space = {"type": "log", "base": 2.0}
    assert flat({"a": {"b": space}, "c": {"type": "const", "val": 3}}) == {
        "a.b": space,
        "c": 3,
    }
