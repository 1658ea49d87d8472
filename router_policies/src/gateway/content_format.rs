//! In which form engines give a chat template the content of a message: in parts, or as one text.
//!
//! Both engines tell by the template's syntax tree (SGLang 0.5.23 in `detect_jinja_template_content_format`,
//! vLLM 0.32.0 in `_iter_nodes_assign_content_item`). Here the text is searched for the same loops.

use crate::config::Engine;

/// Which engines give a template content in parts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct InParts {
    sglang: bool,
    vllm: bool,
}

impl InParts {
    /// Of a model's templates.
    pub fn of<'a>(templates: impl Iterator<Item = &'a str>) -> Self {
        templates.fold(Self::default(), |found, template| Self {
            sglang: found.sglang || sglang_gives_parts(template),
            vllm: found.vllm || vllm_gives_parts(template),
        })
    }

    pub fn before(self, engine: Engine) -> bool {
        match engine {
            Engine::Sglang => self.sglang,
            Engine::Vllm => self.vllm,
        }
    }
}

/// A loop over a message's content, or a word of a template for more than text.
fn sglang_gives_parts(template: &str) -> bool {
    let is_multimodal = ["image", "audio", "video", "vision"]
        .iter()
        .any(|word| template.contains(word));
    is_multimodal || loops_over_content(template)
}

/// A loop over a message's content, over what is named so outside macros, or in a macro over the
/// parameter that somewhere is given a message's content.
fn vllm_gives_parts(template: &str) -> bool {
    let macros: Vec<Macro> = macros(template).collect();
    let mut outside = template.to_owned();
    for one in &macros {
        outside = outside.replace(one.body, "");
    }
    loops_over_content(template)
        || loops_over(&outside, "content")
        || macros.iter().any(|one| {
            one.parameters
                .iter()
                .enumerate()
                .filter(|(_, name)| loops_over(one.body, name))
                .any(|(place, name)| is_given_content(template, one.name, place, name))
        })
}

fn loops_over_content(template: &str) -> bool {
    iterables(template).any(|of| {
        ["message", "msg", "m"]
            .iter()
            .any(|name| has_content(of, name))
    })
}

fn loops_over(template: &str, name: &str) -> bool {
    iterables(template).any(|of| word(of) == name && !of[name.len()..].starts_with(['.', '[', '(']))
}

/// What stands behind each ` in `.
fn iterables(template: &str) -> impl Iterator<Item = &str> {
    template
        .match_indices(" in ")
        .map(|(at, found)| template[at + found.len()..].trim_start())
}

/// Whether `text` begins with the content of the message `name`.
fn has_content(text: &str, name: &str) -> bool {
    const CONTENT: [&str; 3] = [".content", "['content']", "[\"content\"]"];
    text.strip_prefix(name)
        .is_some_and(|rest| CONTENT.iter().any(|content| rest.starts_with(content)))
}

/// The name that `text` begins with.
fn word(text: &str) -> &str {
    let end = text.find(|one: char| !one.is_alphanumeric() && one != '_');
    &text[..end.unwrap_or(text.len())]
}

struct Macro<'a> {
    name: &'a str,
    parameters: Vec<&'a str>,
    body: &'a str,
}

fn macros(template: &str) -> impl Iterator<Item = Macro<'_>> {
    template.match_indices("macro ").filter_map(|(at, found)| {
        // Not the end of another word, as of `endmacro`.
        let is_tag = template[..at].ends_with(['%', '-', '+', ' ', '\n']);
        let rest = template[at + found.len()..].trim_start();
        let name = word(rest);
        let (parameters, rest) = arguments(rest.strip_prefix(name)?)?;
        let body = &rest[..rest.find("endmacro")?];
        (is_tag && !name.is_empty()).then_some(Macro {
            name,
            parameters: parameters.into_iter().map(word).collect(),
            body,
        })
    })
}

/// Whether a call of `name` gives a message's content as the parameter at `place`.
fn is_given_content(template: &str, name: &str, place: usize, parameter: &str) -> bool {
    template.match_indices(name).any(|(at, _)| {
        let is_whole = !template[..at].ends_with(|one: char| one.is_alphanumeric() || one == '_');
        let Some((given, _)) = arguments(&template[at + name.len()..]).filter(|_| is_whole) else {
            return false;
        };
        given.iter().enumerate().any(|(at, argument)| {
            let value = match argument.split_once('=') {
                Some((key, value)) if key.trim_end() == parameter => value.trim_start(),
                Some(_) => return false,
                None if at == place => argument,
                None => return false,
            };
            // An element of the messages counts as one of them.
            let message = word(value);
            let element = value[message.len()..].split_inclusive(']').next();
            let indexed = format!("{message}{}", element.unwrap_or_default());
            !message.is_empty() && (has_content(value, message) || has_content(value, &indexed))
        })
    })
}

/// What stands between the parentheses that `text` begins with, by commas, and what follows them.
fn arguments(text: &str) -> Option<(Vec<&str>, &str)> {
    let inner = text.strip_prefix('(')?;
    let (mut found, mut begin, mut depth) = (Vec::new(), 0, 0_usize);
    for (at, one) in inner.char_indices() {
        match one {
            '(' | '[' | '{' => depth += 1,
            ')' if depth == 0 => {
                found.push(inner[begin..at].trim());
                return Some((found, &inner[at + 1..]));
            }
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                found.push(inner[begin..at].trim());
                begin = at + 1;
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_give_parts_to_templates_that_go_through_them() {
        let through_macro = |call: &str| {
            format!(
                "{{%- macro text(role, of) -%}}{{%- for part in of -%}}{{{{ part }}}}{{%- endfor -%}}{{%- endmacro -%}}\
                 {{% for message in messages %}}{{{{ {call} }}}}{{% endfor %}}"
            )
        };
        for (template, sglang, vllm) in [
            ("{% for part in message.content %}", true, true),
            ("{% for part in message['content'] %}", true, true),
            ("{% for part in m[\"content\"] %}", true, true),
            (
                "{% for message in messages %}{{ message.content }}",
                false,
                false,
            ),
            ("{% if 'content' in message %}", false, false),
            ("{% for part in content %}", false, true),
            ("{% for part in contents %}", false, false),
            (
                "{% macro shown(content) %}{% for part in content %}{% endmacro %}",
                false,
                false,
            ),
            ("{% if message.images %}", true, false),
            (&through_macro("text('u', message.content)"), false, true),
            (
                &through_macro("text('u', messages[0].content|trim)"),
                false,
                true,
            ),
            (
                &through_macro("text(of=message['content'], role='u')"),
                false,
                true,
            ),
            (&through_macro("text(message.content, [])"), false, false),
            (
                &through_macro("context('u', message.content)"),
                false,
                false,
            ),
        ] {
            let found = InParts::of(std::iter::once(template));
            assert_eq!(found, InParts { sglang, vllm }, "{template}");
        }
    }

    #[test]
    fn a_template_that_ends_in_the_middle_is_searched_as_far_as_it_goes() {
        for template in [
            "{% macro text(",
            "{% macro text(of) %}{% for part in of",
            "{% macro",
            " in ",
        ] {
            assert_eq!(InParts::of(std::iter::once(template)), InParts::default());
        }
    }
}
