//! Log-probabilities, on the host.

use crate::request::TokenLogprobs;

/// Log-probability of `token` under `logits`, and of the `top` most probable tokens. Sums run in
/// f64 from the lowest id up.
pub fn logprobs(logits: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - largest).exp()).sum();
    let log_sum = sum.ln();
    let logprob = |id: u32| {
        let logit = logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
        (f64::from(logit - largest) - log_sum) as f32
    };
    let top = top.min(logits.len());
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let better =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if top < ids.len() && top > 0 {
        ids.select_nth_unstable_by(top - 1, better);
    }
    ids.truncate(top);
    ids.sort_unstable_by(better);
    let top = ids.into_iter().map(|id| (id, logprob(id))).collect();
    TokenLogprobs { token, logprob: logprob(token), top }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_those_of_a_softmax() {
        let found = logprobs(&[1.0, 3.0, 2.0, 3.0], 2, 3);
        let sum: f64 = [1.0f64, 3.0, 2.0, 3.0].iter().map(|x| x.exp()).sum();
        assert!((f64::from(found.logprob) - (2.0 - sum.ln())).abs() < 1e-6);
        let ids: Vec<u32> = found.top.iter().map(|&(id, _)| id).collect();
        assert_eq!(ids, vec![1, 3, 2]);
        assert_eq!(logprobs(&[0.0], 0, 0).top, vec![]);
        assert_eq!(logprobs(&[0.0, f32::NEG_INFINITY], 0, 5).top.len(), 2);
    }
}
