import pytest
from datasets import Dataset

from upweight.data.prepare import require_both_labels
from upweight.errors import UserError
from upweight.methods import DPO, KTO


def labelled(*labels: bool) -> Dataset:
    return Dataset.from_list([{"label": label} for label in labels])


@pytest.mark.parametrize("label", [True, False])
def test_rows_of_one_kind_are_refused_with_a_row(label):
    other = "kto_undesirable_weight" if label else "kto_desirable_weight"
    with pytest.raises(
        UserError, match=rf"datasets\[0\], row 3, 'label'.*\(2\) are labelled {str(label).lower()}.*{other}: 0"
    ):
        require_both_labels(labelled(label, label), KTO(), lambda: "datasets[0], row 3")


def test_a_kind_that_counts_for_nothing_may_be_missing():
    require_both_labels(labelled(True, True), KTO(undesirable_weight=0.0), lambda: "")
    with pytest.raises(UserError):
        require_both_labels(labelled(True, True), KTO(desirable_weight=0.0), lambda: "")


def test_both_kinds_and_other_methods_pass():
    require_both_labels(labelled(True, False), KTO(), lambda: "")
    require_both_labels(labelled(True, True), DPO(), lambda: "")
