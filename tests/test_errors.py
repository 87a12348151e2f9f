from prfaas.errors import InputError


def test_one_line_names_place_problem_and_fix() -> None:
    error = InputError("is 0", file="a.toml", where="links.0.gbps", fix="give more")
    assert str(error) == "a.toml: links.0.gbps: is 0; give more"


def test_an_error_keeps_the_file_it_names() -> None:
    assert InputError("x").in_file("outer").file == "outer"
    assert InputError("x", file="inner").in_file("outer").file == "inner"
