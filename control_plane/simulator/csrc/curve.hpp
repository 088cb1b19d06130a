// A measured dependency: straight lines between points, the last one goes on for ever.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace twinplane::simulator {

class Curve {
 public:
  struct Point {
    double x;
    double y;
  };

  // At least one point, x rising from 0 or more, y never negative nor falling beyond the last point. `name` is for the
  // message of the std::invalid_argument it throws otherwise.
  Curve(std::vector<Point> points, const std::string& name) : points_(std::move(points)) {
    if (points_.empty()) throw std::invalid_argument(name + " has no points");
    for (size_t i = 0; i < points_.size(); ++i) {
      const bool is_sane = points_[i].x >= 0 && points_[i].y >= 0 && points_[i].y < 1e15;  // also refuses NaN
      if (!is_sane || (i != 0 && !(points_[i].x > points_[i - 1].x))) {
        throw std::invalid_argument(name + ": point " + std::to_string(i) +
                                    " is negative, not a number, or not to the right of the one before");
      }
    }
    slope_ = 0;
    if (points_.size() > 1) {
      const Point& a = points_[points_.size() - 2];
      const Point& b = points_.back();
      slope_ = (b.y - a.y) / (b.x - a.x);
      if (slope_ < 0) throw std::invalid_argument(name + " falls at its end, so it would become negative");
    }
  }

  // Before the first point: that point's value.
  double operator()(double x) const {
    if (x >= points_.back().x) return points_.back().y + slope_ * (x - points_.back().x);
    if (x <= points_.front().x) return points_.front().y;
    const auto right = std::ranges::upper_bound(points_, x, {}, &Point::x);
    const Point& b = *right;
    const Point& a = *(right - 1);
    return a.y + (b.y - a.y) * (x - a.x) / (b.x - a.x);
  }

 private:
  std::vector<Point> points_;
  double slope_;
};

}  // namespace twinplane::simulator
