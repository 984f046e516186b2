"""A model as a program: its captured and functionalized graph, data flow and cost."""
