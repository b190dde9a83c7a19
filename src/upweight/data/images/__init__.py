"""Images in rows: read where a row has them, marked in its texts, and kept as references in prepared rows."""
