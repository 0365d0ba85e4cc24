"""The data gate: from files of conversations to proven token rows, or to the line that is wrong."""
