import pytest

from bozza.drafters.spec import check_drafting, drafter_names, parse_spec
from bozza.errors import ConfigError


def test_forms_of_a_specification():
    assert parse_spec("ngram").options == {}
    spec = parse_spec("ngram:min=1,max=8,k=10")
    assert (spec.kind, spec.tokens, spec.options) == ("ngram", 10, {"min": 1, "max": 8})
    spec = parse_spec("model:/some/folder,k=3")
    assert (spec.kind, spec.tokens, spec.model) == ("model", 3, "/some/folder")
    assert parse_spec("model:owner/name").model == "owner/name"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ngramm", "no drafter 'ngramm'"),
        ("ngram:mini=2", "it takes k=N, min=N, max=N"),
        ("ngram:min", "has no option 'min'"),
        ("ngram:min=two", "not a whole number"),
        ("ngram:k=0", "out of range"),
        ("ngram:k=65", "use 1 to 64"),
        ("model", "say which model"),
        ("model:k=3", "say which model"),
        ("model:x,temperature=1", "it takes k=N"),
        ("", "no drafter ''"),
    ],
)
def test_mistakes_are_named_in_one_line(text, says):
    with pytest.raises(ConfigError) as caught:
        parse_spec(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_contradictions_are_refused():
    for draft, policy, says in [
        (["ngram"], "off", "never drafts"),
        ([], "fixed", "needs a drafter"),
        (None, "fxed", "no policy 'fxed'"),
        ("ngram", "fixed", "draft=['ngram']"),
        (["ngram", " ngram"], "fixed", "named twice"),
    ]:
        with pytest.raises(ConfigError, match=says.replace("[", r"\[")):
            check_drafting(draft, policy)
    assert check_drafting(None, "off") == []
    assert [spec.kind for spec in check_drafting(None, "fixed")] == ["grammar", "prediction", "ngram"]


def test_drafters_of_a_kind_are_told_apart():
    specs = [parse_spec(text) for text in ("model:a", "ngram", "model:b")]
    assert drafter_names(specs) == ["model", "ngram", "model2"]
