//! Rotary positions: frequencies, and the angles of a step's rows.
//!
//! The angle is f32(position) * f32(frequency) rounded to f32, as the model was trained; cosine and
//! sine of that f32 value are evaluated in f64 and rounded once, so every device rotates by the
//! same numbers.

use crate::config::TextConfig;

/// Frequencies of the two rotations of the model.
pub struct Rope {
    /// Window-only layers and draft stages: `[rope_dims / 2]`.
    pub plain: Vec<f32>,
    /// Compressed layers (YaRN): `[rope_dims / 2]`.
    pub compressed: Vec<f32>,
}

impl Rope {
    /// Frequencies for `config`. Rounded to f32 at each step that the reference
    /// rounds.
    pub fn new(config: &TextConfig) -> Self {
        let dims = config.qk_rope_head_dim;
        let scaling = &config.rope_scaling;
        let plain = frequencies(config.rope_theta, dims);
        let base = frequencies(config.compress_rope_theta, dims);
        let theta = config.compress_rope_theta;
        let correction = |rotations: f64| {
            let original = scaling.original_max_position_embeddings as f64;
            dims as f64 * (original / (rotations * 2.0 * std::f64::consts::PI)).ln()
                / (2.0 * theta.ln())
        };
        let low = correction(scaling.beta_fast).floor().max(0.0);
        let mut high = correction(scaling.beta_slow).ceil().min(dims as f64 - 1.0);
        if low == high {
            high += 0.001;
        }
        let compressed = base
            .iter()
            .enumerate()
            .map(|(i, &f)| {
                let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                f * (1.0 - ramp) + f / scaling.factor as f32 * ramp
            })
            .collect();
        Self { plain, compressed }
    }
}

fn frequencies(theta: f64, dims: usize) -> Vec<f32> {
    (0..dims / 2)
        .map(|i| {
            let exponent = 2.0 * i as f32 / dims as f32;
            1.0 / theta.powf(f64::from(exponent)) as f32
        })
        .collect()
}

/// Appends (cosine, sine) of every frequency at `position`.
pub fn push_angles(frequencies: &[f32], position: u32, out: &mut Vec<f32>) {
    for &f in frequencies {
        let angle = f64::from(position as f32 * f);
        out.push(angle.cos() as f32);
        out.push(angle.sin() as f32);
    }
}
