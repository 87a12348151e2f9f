"""Results for people: tables, figures, progress bars."""
