"""The paper's figures again, by the production conductor in virtual time."""
