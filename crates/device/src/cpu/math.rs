//! Elementary functions in f32, of our own so that every device can compute the same bits: only
//! additions, multiplications, divisions, square roots and fused multiply-adds, in the order
//! written here.
//!
//! The polynomials are minimax fits (Remez exchange in 60-digit arithmetic, then rounded to f32):
//! `(e^r - 1 - r) / r^2` on +-ln(2)/2 with relative error of `e^r` below 3.2e-9, and
//! `(ln(1+f) - f + f^2/2) / f^3` on sqrt(1/2)-1 ..= sqrt(2)-1 with error below 8e-10 of `ln(1+f)`.
//! `ln(2)` is split as 355/512 (exact times any exponent) and a rest, after Cody and Waite.

/// High part of ln(2): 355/512.
const LN2_HI: f32 = 0.693_359_4;
/// ln(2) - LN2_HI.
const LN2_LO: f32 = -2.121_944_4e-4;
/// Adding and subtracting it rounds a small number to an integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// `e^x`. Error under 1 ulp, gradual underflow included. `e^0` is exactly 1.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Comparisons are written so that NaN passes through.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN2_HI, x);
    let r = n.mul_add(-LN2_LO, r);
    let p = f32::from_bits(0x3ab5_1129);
    let p = p.mul_add(r, f32::from_bits(0x3c09_1d81));
    let p = p.mul_add(r, f32::from_bits(0x3d2a_ac7c));
    let p = p.mul_add(r, f32::from_bits(0x3e2a_aa48));
    let p = p.mul_add(r, f32::from_bits(0x3eff_fffe));
    let p = (r * r).mul_add(p, r) + 1.0;
    // 2^n in two steps: the first product is exact, the second rounds once, denormals too.
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let n1 = n >> 1;
    let n2 = n.wrapping_sub(n1);
    p * pow2(n1) * pow2(n2)
}

/// `2^n` for `-127 < n < 128`.
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// Natural logarithm. Error under 1 ulp; denormals are exact inputs. 0 gives -inf, negative
/// numbers NaN.
#[inline(always)]
pub fn log(x: f32) -> f32 {
    let tiny = x < f32::MIN_POSITIVE;
    let scaled = if tiny { x * 16_777_216.0 } else { x };
    let lift = if tiny { -24.0 } else { 0.0 };
    // Take the exponent off so that the mantissa lies in sqrt(1/2) ..= sqrt(2).
    let shifted = scaled.to_bits().wrapping_sub(0x3f35_04f3);
    let e = (shifted as i32 >> 23) as f32 + lift;
    let m = f32::from_bits((shifted & 0x007f_ffff).wrapping_add(0x3f35_04f3));
    let f = m - 1.0;
    let p = f32::from_bits(0x3d8d_a802);
    let p = p.mul_add(f, f32::from_bits(0xbdf1_7e99));
    let p = p.mul_add(f, f32::from_bits(0x3df3_2a87));
    let p = p.mul_add(f, f32::from_bits(0xbdfd_a02e));
    let p = p.mul_add(f, f32::from_bits(0x3e11_9927));
    let p = p.mul_add(f, f32::from_bits(0xbe2a_b179));
    let p = p.mul_add(f, f32::from_bits(0x3e4c_d2a6));
    let p = p.mul_add(f, f32::from_bits(0xbe7f_fff7));
    let p = p.mul_add(f, f32::from_bits(0x3eaa_aaa3));
    let f2 = f * f;
    let y = (f2 * f).mul_add(p, e * LN2_LO);
    let y = f2.mul_add(-0.5, y);
    let y = e.mul_add(LN2_HI, f + y);
    // Written as one select each, so that lanes stay together.
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if x >= 0.0 { y } else { f32::NAN }
}

/// `ln(1 + x)` for `x >= 0` (and a little below). Error under 2 ulp.
#[inline(always)]
pub fn log1p(x: f32) -> f32 {
    let u = 1.0 + x;
    // What the addition rounded away comes back to first order.
    let lost = x - (u - 1.0);
    let y = log(u) + lost / u;
    if x == f32::INFINITY { x } else { y }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    // The exponential of a negative number: nothing overflows, small results keep their digits.
    let e = exp(-x.abs());
    let numerator = if x < 0.0 { e } else { 1.0 };
    numerator / (1.0 + e)
}

/// `x * sigmoid(x)`; -0 at negative infinity. Error under 3 ulp above -87, where the sigmoid is
/// still a normal number.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    let s = sigmoid(x);
    let x = if x < -200.0 { -200.0 } else { x };
    x * s
}

/// `ln(1 + e^x)`.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    let positive = if x > 0.0 { x } else { 0.0 };
    positive + log1p(exp(-x.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance of `got` from the f64 value in units of the last place of f32.
    fn ulps(got: f32, want: f64) -> f64 {
        let near = want as f32;
        if got.is_nan() || near.is_nan() || near.is_infinite() || got.is_infinite() {
            let same = got == near || (got.is_nan() && near.is_nan());
            return if same { 0.0 } else { f64::INFINITY };
        }
        let exponent = (near.abs().max(f32::MIN_POSITIVE)).log2().floor() as i32;
        (f64::from(got) - want).abs() / 2f64.powi(exponent - 23)
    }

    /// Every 997th bit pattern and the neighbours of special ones.
    fn inputs() -> impl Iterator<Item = f32> {
        let special = [0.0f32, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]
            .into_iter()
            .chain([f32::MIN_POSITIVE, f32::from_bits(1), f32::MAX, f32::MIN])
            .chain((-2000..=2000).map(|i| i as f32 / 16.0))
            .chain((-2000..=2000).map(|i| 88.7 + i as f32 / 4096.0))
            .chain((-2000..=2000).map(|i| -103.5 + i as f32 / 1024.0));
        special.chain((0..u32::MAX / 997).map(|i| f32::from_bits(i * 997)))
    }

    fn worst(f: fn(f32) -> f32, reference: fn(f64) -> f64, keep: fn(f32) -> bool) -> (f64, f32) {
        inputs().filter(|x| keep(*x)).fold((0.0, 0.0), |worst, x| {
            let u = ulps(f(x), reference(f64::from(x)));
            if u > worst.0 { (u, x) } else { worst }
        })
    }

    #[test]
    fn functions_are_accurate_everywhere() {
        let all: fn(f32) -> bool = |_| true;
        let sigmoid64: fn(f64) -> f64 = |x| 1.0 / (1.0 + (-x).exp());
        let softplus64: fn(f64) -> f64 = |x| if x > 40.0 { x } else { x.exp().ln_1p() };
        let check = |name: &str, (u, at): (f64, f32), limit: f64| {
            assert!(u <= limit, "{name}({at:e}) is off by {u} ulp");
            println!("{name}: {u:.3} ulp at {at:e}");
        };
        check("exp", worst(exp, f64::exp, all), 1.0);
        check("log", worst(log, f64::ln, all), 1.0);
        check("log1p", worst(log1p, f64::ln_1p, |x| x >= 0.0), 2.0);
        check("sigmoid", worst(sigmoid, sigmoid64, all), 2.5);
        check("softplus", worst(softplus, softplus64, all), 2.5);
        let normal: fn(f32) -> bool = |x| x > -87.0;
        check("silu", worst(silu, |x| x / (1.0 + (-x).exp()), normal), 3.0);
    }

    #[test]
    fn special_values() {
        assert_eq!(exp(0.0).to_bits(), 1.0f32.to_bits());
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(log(1.0).to_bits(), 0);
        assert_eq!(log(0.0), f32::NEG_INFINITY);
        assert_eq!(log(-0.0), f32::NEG_INFINITY);
        assert!(log(-1.0).is_nan() && log(f32::NEG_INFINITY).is_nan());
        assert_eq!(silu(f32::NEG_INFINITY), 0.0);
        for f in [exp, log, log1p, sigmoid, silu, softplus] {
            assert!(f(f32::NAN).is_nan());
        }
    }
}
