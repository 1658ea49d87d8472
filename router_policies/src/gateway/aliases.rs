//! Names under which clients may ask for a model: agents name small models and those of sub-agents by names of
//! their vendor's. `*` in a name stands for any text.

use std::collections::BTreeMap;

/// Names and the models that they stand for: those without a `*` first, then the longest first.
#[derive(Debug, Default)]
pub(crate) struct Aliases(Vec<(String, String)>);

impl Aliases {
    pub fn new(given: &BTreeMap<String, String>) -> Self {
        let pairs = given
            .iter()
            .map(|(name, model)| (name.clone(), model.clone()));
        let mut all: Vec<_> = pairs.collect();
        all.sort_by_key(|(name, _)| (name.contains('*'), std::cmp::Reverse(name.len())));
        Self(all)
    }

    /// The model that a name stands for, if it stands for another.
    pub fn model(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(pattern, _)| matches(pattern, name));
        found
            .map(|(_, model)| model.as_str())
            .filter(|model| *model != name)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Each name, and the model that it stands for.
    pub fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(name, model)| (name.as_str(), model.as_str()))
    }
}

/// Whether `name` is `pattern`, in which each `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((begin, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(name) = name.strip_prefix(begin) else {
        return false;
    };
    let mut ends = (0..=name.len()).filter(|&at| name.is_char_boundary(at));
    ends.any(|at| matches(rest, &name[at..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_for_the_model_of_the_alias_that_says_most_of_it() {
        let given = [
            ("claude-*", "large"),
            ("claude-haiku-*", "small"),
            ("claude-haiku-4-5", "exact"),
            ("*mini*", "mini"),
            ("large", "large"),
        ];
        let given = given.map(|(name, model)| (name.to_owned(), model.to_owned()));
        let aliases = Aliases::new(&given.into_iter().collect());
        for (name, model) in [
            ("claude-sonnet-4", Some("large")),
            ("claude-haiku-4-5-20251001", Some("small")),
            ("claude-haiku-4-5", Some("exact")),
            ("gpt-mini-ü", Some("mini")),
            ("claude", None),
            ("large", None),
            ("other", None),
        ] {
            assert_eq!(aliases.model(name), model, "{name}");
        }
    }
}
