"""The site half: opens the site's own data, trains, evaluates, and lets out only what is declared."""
