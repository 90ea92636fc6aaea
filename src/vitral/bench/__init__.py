"""Speed, measured fairly: backends in processes of their own, clocks in turns, tables that say how and where."""
