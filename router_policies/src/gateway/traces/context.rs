//! Which trace a request belongs to: the header `traceparent` of W3C's Trace Context (level 1).

use hyper::header::HeaderValue;

/// What a `traceparent` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    pub trace_id: u128,
    /// The caller's span.
    pub span_id: u64,
    /// Whoever began the trace records it, and wants others to.
    pub is_sampled: bool,
}

const SAMPLED: u8 = 1;

impl TraceParent {
    /// Reads a header's value; none where it is not one, so that a new trace begins.
    pub fn parse(value: &[u8]) -> Option<Self> {
        // Later versions may have more behind another dash.
        let (known, more) = value.split_at_checked(55)?;
        let fields: [&[u8]; 4] = [&known[..2], &known[3..35], &known[36..52], &known[53..]];
        let is_hexadecimal = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if [2, 35, 52].iter().any(|&at| known[at] != b'-')
            || !fields.iter().all(|field| field.iter().all(is_hexadecimal))
        {
            return None;
        }
        let [version, trace_id, span_id, flags] = fields.map(std::str::from_utf8);
        match (version.ok()?, more) {
            ("ff", _) => return None,
            (_, []) => {}
            ("00", _) => return None,
            (_, more) => more.starts_with(b"-").then_some(())?,
        }
        let flags = u8::from_str_radix(flags.ok()?, 16).ok()?;
        let parent = Self {
            trace_id: u128::from_str_radix(trace_id.ok()?, 16).ok()?,
            span_id: u64::from_str_radix(span_id.ok()?, 16).ok()?,
            is_sampled: flags & SAMPLED != 0,
        };
        (parent.trace_id != 0 && parent.span_id != 0).then_some(parent)
    }

    /// The header's value.
    pub fn header(self) -> Option<HeaderValue> {
        let flags = if self.is_sampled { SAMPLED } else { 0 };
        let value = format!(
            "00-{:032x}-{:016x}-{flags:02x}",
            self.trace_id, self.span_id
        );
        HeaderValue::try_from(value).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIVEN: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn what_is_read_is_written_alike() {
        let parent = TraceParent::parse(GIVEN.as_bytes()).expect("valid");
        assert_eq!(parent.trace_id, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!(parent.span_id, 0x00f0_67aa_0ba9_02b7);
        assert!(parent.is_sampled);
        assert_eq!(parent.header().expect("a header"), GIVEN);
        let unsampled = GIVEN.replace("-01", "-00");
        let parent = TraceParent::parse(unsampled.as_bytes()).expect("valid");
        assert!(!parent.is_sampled);
        assert_eq!(parent.header().expect("a header"), unsampled);
    }

    #[test]
    fn later_versions_are_read_as_far_as_they_are_known_and_nothing_else_is() {
        let of = |value: String| TraceParent::parse(value.as_bytes());
        let later = GIVEN.replacen("00", "cc", 1);
        assert_eq!(of(later.clone()), of(GIVEN.to_owned()));
        assert_eq!(of(format!("{later}-more")), of(GIVEN.to_owned()));
        for wrong in [
            String::new(),
            GIVEN[..54].to_owned(),
            format!("{GIVEN}-more"),
            format!("{later}more"),
            GIVEN.replacen("00", "ff", 1),
            GIVEN.to_uppercase(),
            GIVEN.replace('-', "_"),
            GIVEN.replace("4bf9", "+bf9"),
            GIVEN.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            GIVEN.replace("00f067aa0ba902b7", &"0".repeat(16)),
            "é".repeat(28),
        ] {
            assert_eq!(of(wrong.clone()), None, "{wrong}");
        }
    }
}
