"""The front door holds what it promises."""

from pathlib import Path

import weightcast
from weightcast import errors


def test_every_public_name_is_there():
    assert sorted(weightcast.__all__, key=str.lower) == sorted(set(weightcast.__all__), key=str.lower)
    for name in weightcast.__all__:
        assert getattr(weightcast, name) is not None


def test_every_error_has_its_own_code_and_stands_in_the_drawn_tree():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.WeightcastError)]
    codes = [c.code for c in classes]
    assert len(codes) == len(set(codes))
    for cls in classes:
        assert cls.__name__ in errors.__doc__
        assert cls.exit_code in (1, 2)


def test_every_error_is_explained_in_the_docs_with_its_code_and_exit_status():
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, errors.WeightcastError) and cls is not errors.WeightcastError:
            (row,) = [line for line in page.splitlines() if line.startswith(f"| `{cls.__name__}` ")]
            assert f"`{cls.code}`" in row
            assert row.endswith(f"| {cls.exit_code} |")
